def ess_learning_rate_factor(r, *, base_ratio, power):
    return min(1.0, r / base_ratio) ** power
