-- tenant_limits: set some of a tenant's limits (`numbers`, as text to be exact) and reset others (`back`) to their
-- defaults. Idempotent.
local limits = KEYS[1]
local args = cjson.decode(ARGV[1])

for quota, number in pairs(args.numbers) do
  redis.call('HSET', limits, quota, number)
end
for _, quota in ipairs(args.back) do
  redis.call('HDEL', limits, quota)
end
return 'OK'
