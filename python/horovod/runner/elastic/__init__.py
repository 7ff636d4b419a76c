"""What scripts import of the original's elastic launcher that means something here; the launcher is `horovodrun`."""
