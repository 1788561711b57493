"""Floor 3: running it. Configuration, trajectory queue, fleet, supervisor, observers, commands."""
