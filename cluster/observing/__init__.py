"""What a person sees of a run: events, and the observers that make files, metrics and views."""
