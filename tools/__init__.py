"""What `./dev` and the nox sessions are made of; nothing here is shipped."""
