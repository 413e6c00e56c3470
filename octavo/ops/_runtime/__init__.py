"""What every op is made with: registration with torch.library, kernel launches, support by device."""
