"""Floor 0: the mathematics of policy-lag-aware importance correction. Torch and stdlib only."""
