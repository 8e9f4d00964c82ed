"""What one GPU's weight sync takes, ours beside vLLM's own backends and the hardware's limits."""
