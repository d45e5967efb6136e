"""The token generator: a token history with selectable profiles and cache modes."""
