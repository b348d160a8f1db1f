"""What decides on the device. It has never run on a GPU; no default and no "auto" chooses it."""
