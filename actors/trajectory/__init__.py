"""What actors produce: frozen records, their Arrow schema and the codec between them."""
