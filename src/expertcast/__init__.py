"""expertcast: forecast the experts a Mixture-of-Experts model routes to next, and hide their transfers."""

__version__ = "0.1.0"
