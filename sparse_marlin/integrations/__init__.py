"""What other libraries need to read the checkpoints of this one."""
