"""The trajectory queue: a plain state machine with its ledger, and the Ray actor around it."""
