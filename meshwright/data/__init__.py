"""Text to tokens to samples. The sample a rank sees is a pure function of the seed and the global sample index."""
