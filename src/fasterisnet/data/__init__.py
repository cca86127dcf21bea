"""Images with masks, and the biased benchmarks of the paper."""
