"""What launchers and integrations share."""
