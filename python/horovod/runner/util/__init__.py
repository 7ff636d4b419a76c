"""What launchers of others import from here."""
