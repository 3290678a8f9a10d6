"""Low-precision products, principal components, and the number types that a device multiplies."""
