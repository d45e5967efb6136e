"""The engine under every runner: programs, their choice by row count, steps."""
