"""The runtime's own flow and policies over a link that only counts seconds, fed from recorded routing."""
