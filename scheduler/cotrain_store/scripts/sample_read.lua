-- sample_read: clients have these results: they need not be kept as long. Changes nothing else.
-- needs: ages
local args = cjson.decode(ARGV[1])

for _, request in ipairs(args.requests) do
  local sample, result = 'cotrain:sample:' .. request, 'cotrain:result:' .. request
  if redis.call('EXISTS', result) == 1 then -- so its request is done
    end_sooner(result, args.ttl_ms)
    end_sooner(sample, args.ttl_ms + args.record_ms)
  end
end
return 'OK'
