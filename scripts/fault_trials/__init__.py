"""What damage to files, kills and full disks come to: parts of `mutate_artefacts.py` and `kill_commands.py`."""
