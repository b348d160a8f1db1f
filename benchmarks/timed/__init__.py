"""The CUDA path on a machine that is not there: its own code over streams, events and copy engines in virtual time."""
