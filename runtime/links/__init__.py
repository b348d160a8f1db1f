"""Links, which move experts from a store into slots, and small tensors between host and device."""
