"""What a user asks for: arguments, configurations, settings; secrets are taken out here."""
