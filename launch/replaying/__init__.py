"""What `launch.replay` is made of: prompts of a trace, targets to send them to, what came back."""
