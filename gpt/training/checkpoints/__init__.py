"""When a run is saved, and how it continues."""
