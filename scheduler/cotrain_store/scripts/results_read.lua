-- results_read: clients hold these results: they need not be kept as long.
local ttl_ms = tonumber(ARGV[1])
local FIRST = 2 -- then the requests

for i = FIRST, #ARGV do
  end_sooner('cotrain:result:' .. ARGV[i], ttl_ms)
end
return 'OK'
