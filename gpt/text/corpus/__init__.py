"""What is read: which files hold a text, and the documents in them."""
