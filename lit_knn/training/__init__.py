"""Code shared by the training modules: the step, conditioning, augmentation, monitoring and its clock."""
