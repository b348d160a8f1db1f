"""What a newcomer does with expertcast: every command of the README, and the tools that people already have.

`scripts/newcomer.sh` installs the wheel and runs this package (`python -m newcomer_steps`).
"""
