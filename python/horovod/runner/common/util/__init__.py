"""Small modules that launchers of others import."""
