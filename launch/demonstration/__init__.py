"""The parts of `python -m launch.demo`: what is asked, how, and how it is checked and told."""
