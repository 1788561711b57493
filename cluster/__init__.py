"""Floor 3: running it. Configuration, trajectory queue, ledger, supervisor, monitoring and the command line."""
