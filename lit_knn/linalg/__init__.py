"""Products in few digits, principal components, and the number types a device multiplies."""
