"""What torch's distributed engines lack, below the layers: agreement of ranks on delayed scaling's amaxes."""
