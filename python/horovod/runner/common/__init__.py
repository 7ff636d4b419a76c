"""Common to launchers and integrations."""
