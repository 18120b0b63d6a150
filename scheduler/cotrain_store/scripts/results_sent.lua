-- results_sent: results were sent to their clients: they count as unread no more. Twice is harmless.
local FIRST = 1 -- for each result: tenant, request

for i = FIRST, #ARGV, 2 do
  note_read(ARGV[i], ARGV[i + 1])
end
return 'OK'
