"""What puts jobs in: the client library, the batch runner and the HTTP gateway."""
