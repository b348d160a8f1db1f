"""An OpenAI server over an offloaded model: transformers' own, with what a server in use needs around it."""
