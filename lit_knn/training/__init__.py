"""What the training modules share: the step, conditioning, augmentation, monitoring and its clock."""
