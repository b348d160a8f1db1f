"""The policy study: what decides about experts, on one trace, and what held of the papers' claims."""
