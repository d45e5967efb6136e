"""From a path to a model that can be run: configuration, weights, settings."""
