"""The API: requests and answers as documents, and the server as clients meet it."""
