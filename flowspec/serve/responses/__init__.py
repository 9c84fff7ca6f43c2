"""The Responses API as another form of a chat: requests become chats, answers items and typed events."""
