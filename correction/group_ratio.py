def group_log_ratio(*a):
    raise NotImplementedError


def log_group_expectation(*a):
    raise NotImplementedError
