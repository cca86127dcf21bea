"""A run on disk: its options, its weights, and what is made of them when training is over."""
