"""Does a classifier look at the background? The answer for any trained network, with its evidence, on one page."""
