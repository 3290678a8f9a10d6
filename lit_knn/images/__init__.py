"""Images on a disk: zips, folders and arrays, and the mapped `.npy` that is made of them; needs no torch."""
