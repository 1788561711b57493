import torch


def _k(*a, **k):
    return torch.ones_like(a[0], dtype=torch.bool)


within_lag = geometric_band = k3_limit = veto = dppo_tv = dppo_kl = kpop = second_moment = opsm = _k
