"""Names that other launchers import from here."""
