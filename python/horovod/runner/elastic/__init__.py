"""Names of the original's elastic launcher that have a meaning here; the launcher is `horovodrun`."""
