"""Speculative decoding: drafts, and steps that verify several of them."""
