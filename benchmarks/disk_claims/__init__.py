"""What ZipMoE says of experts on a disk, measured with this package's own parts, and judged."""
