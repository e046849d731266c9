"""What a dry run stands on: tensors without values, what is answered for them, and which line asked."""
